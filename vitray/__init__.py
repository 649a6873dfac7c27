"""vitray: Vision Transformers on Ray, from image bytes to registered model."""
