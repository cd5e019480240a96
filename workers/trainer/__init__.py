"""The trainer role: groups become updates, updates become versions."""
