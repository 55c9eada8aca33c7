# Prints, as JSON, where this interpreter's packages and scripts are, and the files there by which an
# interpreter or pytest load code by themselves. Arguments: the folder of the repository, and more
# files to print. Started with `-I -S -B`, so that none of these files has an effect here.
import glob
import json
import os
import site
import sys
import sysconfig

MOST = 1 << 18
tree = sys.argv[1]
paths = sysconfig.get_paths()
known = site.getsitepackages() if hasattr(site, "getsitepackages") else []
sites = sorted(set(os.path.realpath(p) for p in known + [paths["purelib"], paths["platlib"]]))
patterns = ["*.pth", "*.egg-link", "__editable__*.py"]
patterns += ["*-info/entry_points.txt", "*.egg/EGG-INFO/entry_points.txt"]
patterns += ["*-info/direct_url.json", "*-info/top_level.txt"]
places = [os.path.join(folder, pattern) for folder in sites for pattern in patterns]
for folder in (tree, tree + "/src", tree + "/lib", tree + "/python"):
    places.append(folder + "/*-info/entry_points.txt")
found = [path for place in places for path in glob.glob(place)]


def text_of(path):
    """The file's text; None for one that is not a short text."""
    try:
        if not os.path.isfile(path) or os.path.getsize(path) > MOST:
            return None
        with open(path, "rb") as file:
            return file.read().decode("utf-8")
    except (OSError, ValueError):
        return None


def name_of(path):
    """The path as text; a byte of it that is not UTF-8 is written as an escape, which no other path has."""
    return path.replace("\\", "\\\\").encode("utf-8", "backslashreplace").decode("utf-8")


files = {name_of(path): text_of(path) for path in found + sys.argv[2:]}
scripts = os.path.realpath(paths["scripts"])
print(json.dumps({"sites": sites, "scripts": scripts, "files": files}))
