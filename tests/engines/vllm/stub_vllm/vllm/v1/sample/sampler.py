class Sampler:
    @staticmethod
    def compute_logprobs(logits):
        return logits.float().log_softmax(-1)
