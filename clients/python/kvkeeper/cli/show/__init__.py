"""What running services report: `status`, `stats`, `top`, `requests`, `sequences`, `explain`.

Owns the questions and the texts, tables and screens of the answers. May import console, kvkeeper.client and the messages of the
protocol; no service.
"""
