"""Opens what the settings name: the database with its key, the nodes and gateways with the streams over them."""
