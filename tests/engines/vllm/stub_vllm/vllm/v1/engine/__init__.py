from types import SimpleNamespace


class EngineCoreRequest(SimpleNamespace):
    pass
