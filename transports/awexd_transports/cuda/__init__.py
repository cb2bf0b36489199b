"""Copies to and from CUDA devices. Nothing of CUDA is touched, nor torch imported, before a device copies."""
