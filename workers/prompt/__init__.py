"""The prompt role: rows of a data source become groups without samples."""
