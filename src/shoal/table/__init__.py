"""Tables of rows that grow: specs, the Shard interface, the shards, and the one-table facade."""
