"""Between this node's daemon and others': how a version's bytes come from there and go to them."""
