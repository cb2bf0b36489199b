"""What moves, and how bytes move: layouts, plans, copies. Importing it loads no torch."""
