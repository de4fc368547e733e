class VLLMValidationError(Exception):
    pass
