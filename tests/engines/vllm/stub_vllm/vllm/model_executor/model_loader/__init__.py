LOADERS = {}


def register_model_loader(name):
    return lambda loader: LOADERS.setdefault(name, loader)
