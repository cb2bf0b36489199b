"""What clients ask of the daemon over its socket, by who asks; each module adds its operations to the service."""
