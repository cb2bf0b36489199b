"""Jobs too large for any machine at hand: real manifests and the real planner, and time that is simulated."""
