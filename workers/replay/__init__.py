"""A worker at work on recorded groups, without a broker."""
