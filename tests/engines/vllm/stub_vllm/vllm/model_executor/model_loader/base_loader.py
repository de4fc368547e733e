class BaseModelLoader:
    def __init__(self, config):
        pass
