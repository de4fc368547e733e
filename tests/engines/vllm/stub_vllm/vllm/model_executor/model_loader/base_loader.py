class BaseModelLoader:
    def __init__(self, load_config):
        self.load_config = load_config
