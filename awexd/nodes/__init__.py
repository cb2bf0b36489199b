"""This daemon among those of other nodes: announced to the MetaServer, serving versions, bringing them here."""
