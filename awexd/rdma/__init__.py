"""The transport ``rdma``: one-sided writes by NIXL, whose agent lives in a process of its own that may be killed."""
