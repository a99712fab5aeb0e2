"""Parts of a data set: finding clusters by streaming k-means, and placing rows into them."""
