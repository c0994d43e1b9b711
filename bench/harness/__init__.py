"""The parts of bench/landing.py and bench/fanout.py.

tools      installs what is needed, in a cache outside the checkout
workload   the objects that everyone reads
servers    nginx, the floor's servers, Ceph; all on loopback, all ended at exit
fleet      several radosgw behind one name, each capped
clients    kvgate, the floor, the AWS SDK and the peers, each of them with one way to be measured
rounds     who is measured when
rows       what is wanted, and what came out
report     the table, the raw samples
"""
