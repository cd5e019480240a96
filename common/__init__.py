"""Data model and contracts shared by every process: no sockets, no torch."""
