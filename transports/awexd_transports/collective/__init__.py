"""Weights moved between client processes, over NCCL or sockets, as few large sends through a bounded ring."""
