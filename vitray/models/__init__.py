"""The networks: stems, positions, blocks, ViT, decoder and tokenizer. Depends on torch alone."""
