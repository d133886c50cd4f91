"""Pages and slots of caches: which sequences hold them, and which prefixes share them."""
