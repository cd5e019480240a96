"""One file a component; the file name is its name."""
