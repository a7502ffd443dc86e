"""Several engine cores behind one front process: routing of requests, start of cores, scaling, other machines."""
