"""Weights moved between client processes, over NCCL or gloo, as few large sends through a bounded ring."""
