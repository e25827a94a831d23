"""Other people's interval methods, carried over to Local SGD, one file each.

Those that need further runs run them as copies of the parameters (`copies`) or a tree (`federation_tree`).
"""
