"""The rollout role: groups without samples become groups with samples."""
