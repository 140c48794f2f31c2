"""Read execution nodes, beacon nodes and IPFS gateways; return plain records that are proven (rule C2)."""
