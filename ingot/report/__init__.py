"""`ingot report`: make one HTML page that shows how an artifact was compiled. The page needs no network."""
