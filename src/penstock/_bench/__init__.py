"""The benchmark: workloads x contenders, each run in a process of its own, against limits measured in the same run.

    workloads    what is to be read, how it is made from a seed, how a batch is checked
    cases        the same for the benchmark of memory, each with its budget
    running      what a contender is, and how whole batches are loaded
    peers        those who are not Penstock, each set up as its own documentation advises
    contenders   all of them
    drive        takes one contender through its epochs and times it
    limits       what the machine could do at best: copies, page-cache reads, bare gathers, perfect sharing
    trial        the process in which one contender runs
    watch        memory and CPU time of that process tree, read from outside
    harness      rounds, interleaving, outcomes
    claims       the figures that Penstock promises, and what a run says about them
    report       terminal, JSON and HTML
    memory       the benchmark of memory: its rounds, its table

A new contender is an entry of PEERS and its name in the workloads that it can do; a new workload is a function
that makes the data, one that gives the job, and an entry of WORKLOADS; a new limit is an entry of LIMITS.

Each file imports only files above it. Nothing of the engine imports this package.
"""
