"""An HTTP server for translations: python -m pyops serve CKPT (docs/serve.md).

api.py          requests and answers as JSON
batching.py     the queue, and how workers get its texts
workers.py      who translates: this process, or others
metrics.py      counters for Prometheus
application.py  the routes (Starlette)
openapi.py      a description of the routes, as JSON and as a page
connections.py  limits of connections (uvicorn)
command.py      the command line
page/           the files of the web page
"""
