"""python write_mds.py FOLDER MDS: write the images of a folder of classes as the shards of Streaming's datasets."""

import sys
from pathlib import Path

from streaming import MDSWriter

folder, out = map(Path, sys.argv[1:])
classes = sorted(path.name for path in folder.iterdir())
files = sorted(folder.glob("*/*"), key=lambda file: int(file.stem))
with MDSWriter(out=str(out), columns={"row": "int", "label": "int", "image": "bytes"}) as shards:
    for file in files:
        shards.write({"row": int(file.stem), "label": classes.index(file.parent.name), "image": file.read_bytes()})
