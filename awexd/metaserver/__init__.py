"""The MetaServer: what the daemons of a cluster tell each other through. ``docs/metaserver.md``; ``openapi.json``."""
