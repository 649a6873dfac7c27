"""Images: datasets of shards, the stream that reads them, and augmentation."""
