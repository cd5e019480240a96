"""The advantage role: rewards of a group become advantages of its tokens."""
