"""The parts of ``crad-mesh check``; ``launch.check`` puts them together."""
