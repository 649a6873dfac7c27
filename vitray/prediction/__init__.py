"""`vitray predict`: classes, features and embeddings of any number of images, as Parquet, each image exactly once."""
