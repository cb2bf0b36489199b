"""What peers do, each in a virtual environment of its own: ``make bench-peers`` makes them."""
