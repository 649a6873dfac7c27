"""How fast images come: vitray's stream against others that do the same to each image."""
