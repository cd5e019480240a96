"""The reward role: every sample of a group gets a score, or a status that says why not."""
