"""The reference role: log-probs of the responses under the frozen initial weights."""
