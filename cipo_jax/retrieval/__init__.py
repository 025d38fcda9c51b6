"""Retrieval: from a corpus file to passages, in process or over HTTP; knows nothing of agents.

`retriever` is the interface. `dense`, `lexical` and `http` search; `cache`, `fusion` and `corruption` wrap other
retrievers; a new one is one file and one gin line. `corpus`, `encoder`, `store`, `embed_corpus`, `index` and `build`
make an index; `service`, `batching`, `limits` and `serve` answer over HTTP.
"""
