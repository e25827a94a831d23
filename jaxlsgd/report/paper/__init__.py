"""The paper reproduced: its tables and figures with ours beside them."""
