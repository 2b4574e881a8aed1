"""What a peer publishes and how a student learns, one file a method.

==================  ===============================================================================================
module              what it has
==================  ===============================================================================================
``catalogue``       the names, and what else the service must know of each; imports no torch
``interface``       :class:`~crad_p2p.methods.interface.Method`: what every method answers
``build``           name to method; layouts of what is published
``backbone``        methods that differ in the target alone: CRAD and all that is compared with it by one equation
``table4``          their weights: ``crad`` (= ``precision``), ``stage1``, ``acc``, ``sup``, ``sm``, ``lcb``, ``ce``,
                    ``inv_sigma``
``uniform``         the plain mean
``uncertainty``     weights from the entropy of each prediction
``fedmkd``          the peers' mean and the own model of the last round
``dfml``            mutual learning: pairwise divergences, cyclic weight, peak model; everybody at home, or all models
                    at one of the peers
``fedmd``           predictions on a transfer set: towards the mean logits of all
``msfkd``           the same, towards those that are sure and agree with most
``fedgd``           the same beside the own labels, on images that generators make of the peers' models
``local``           no peers
==================  ===============================================================================================

Each file says which parts are its source's and which are ours; docs/methods.md says it for users. All of them publish
models, but ``fedmd``, ``msfkd`` and ``fedgd``, and ``dfml`` where one trains for all. A method that publishes something
else again fits in at these places:

**What a peer publishes.** The service tells files apart by a *key*: :meth:`crad_p2p.federation.Federation.published_by`
gives it for (peer, round), from the agreed settings alone, and the learner's ``ready`` has a layout for each key
(:func:`crad_p2p.methods.build.layouts_of`). The key of a model is its architecture; ``predictions`` are a float32
[samples, classes] of the transfer set; ``images-N`` are a part of N images of one that the peers make, uint8
[N, C, H, W]; a ``bundle`` has the tensors of the models of all, with ``ID.`` before their names; ``model_digest`` is
for rounds in which nothing else is to be said. Barrier, transfer, store and signatures know files, not models.

**Whom it is for.** :meth:`~crad_p2p.federation.Federation.teachers_of` says whose last files a peer uses in a round,
also where that is another thing than being taught.

**What a student makes of it.** ``Client.teach`` runs a model over the local epoch as it arrives and keeps posteriors.
What is no model it keeps as it is (:mod:`crad_p2p.transfer`): predictions, of which
:meth:`~crad_p2p.methods.interface.Method.digest` makes what is learned from the transfer set, before the own images or
beside them; and images, which become part of it. Of a bundle it keeps the own model, or all if it is its turn to train
them (:mod:`crad_p2p.together`).

**What a student keeps for itself.** A method's ``state`` lies in the checkpoint of every round, which never leaves the
peer. Where the model is not what is published, ``Client`` puts it there, and ``Client.restore`` and ``Client.evaluate``
(whose ``beside`` it is) take it from there, and compare it with what was published; so does it with a transfer set that
the peers have made. Nobody else can give such a model back to a peer that has lost its disk: ``peer.recovery`` says so
instead (:attr:`~crad_p2p.federation.MethodSettings.why_not_given_back`).
"""
