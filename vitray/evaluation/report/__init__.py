"""`vitray evaluate`: networks scored on a set of images and compared, as a page, JSON and CSV."""
