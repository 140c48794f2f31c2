"""The only SQL, and the embedded PostgreSQL it may run on."""
