"""Measurements of awexd; each module is a command."""
