"""The paper's networks, and lookup by name."""
