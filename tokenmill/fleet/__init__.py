"""Several cores behind one front: which one a request goes to, and how they are started."""
