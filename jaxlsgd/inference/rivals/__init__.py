"""Other people's interval methods, carried over to Local SGD, one file each.

Methods that need further runs make them as copies of the parameters (`copies`) or as a tree of clients
(`federation_tree`). Start reading at `growing_batches`.
"""
