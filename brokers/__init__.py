"""The sample broker, the weight broker and their client: sockets and ledgers, no torch, payload never decoded."""
