"""The networks: names, stems, positions, blocks and the ViT they make. Knows torch alone."""
